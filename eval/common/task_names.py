"""Finds lm-eval's tasks by name. lm-eval parses the files of all its tasks, some 14,000, before it looks one up. Here
only those of `eval/tasks` are parsed if no other task is named, and a name that is in no file is refused at once."""

import difflib
import re
import sys
from pathlib import Path

import lm_eval.tasks
from lm_eval.tasks import TaskManager


TASKS = Path(__file__).parents[1] / "tasks"
ALL_TASKS = "`looped eval ls tasks` lists those that there are"
IN_A_FILE = re.compile(
    rb"""^[ \t-]*(?:["']?(?:task|group|tag)["']?[ \t]*:[\s\[-]*)?["']?([^\s"',\]]+)""", re.MULTILINE
)


def tasks_of(
    names: list[str], folders: list[str | Path], metadata: dict | None = None
) -> tuple[TaskManager, list[str]]:
    """Return a task manager, and the names of the tasks that match these names or patterns.

    folders: folders of tasks besides lm-eval's; of two tasks with the same name, that of the last folder is taken.
    """
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if not all(is_whole(manager, name) for name in names):
        refuse_unknown(names, [*folders, Path(lm_eval.tasks.__file__).parent])
        print("lm-eval reads the files of all its tasks, which may take a minute", file=sys.stderr, flush=True)
        manager = lm_eval.tasks.TaskManager(include_path=folders, metadata=metadata)
    matches = {name: manager.match_tasks([name]) for name in names}
    if missing := [name for name, found in matches.items() if not found]:
        raise ValueError(f"no task is called {', '.join(map(repr, missing))}; {ALL_TASKS}")
    return manager, list(dict.fromkeys(sum(matches.values(), [])))


def is_whole(manager: TaskManager, name: str) -> bool:
    """Return whether this manager knows the task with this name, or all tasks of the group with this name."""
    if name not in manager.all_groups:
        return name in manager.all_subtasks
    members = (manager.task_index[name].cfg or {}).get("task") or []
    return all(isinstance(member, str) and is_whole(manager, member) for member in members)


def refuse_unknown(names: list[str], folders: list[str | Path]):
    known = names_in_files(folders)
    unknown = [name for name in names if not re.search(r"[*?\[]", name) and name not in known]
    if not unknown:
        return
    close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.8)
    advice = f"did you mean {close[0]!r}?" if close else ALL_TASKS
    raise ValueError(f"no task is called {', '.join(map(repr, unknown))}; {advice}")


def names_in_files(folders: list[str | Path]) -> set[str]:
    """Return all words that may name a task, a group or a tag in YAML files and in files without an ending, which YAML
    files include. Files are searched, not parsed."""
    files = (path for folder in folders for path in Path(folder).rglob("*") if path.suffix in ("", ".yaml"))
    found = (IN_A_FILE.findall(path.read_bytes()) for path in files if path.is_file())
    return {word.decode(errors="replace") for words in found for word in words}
