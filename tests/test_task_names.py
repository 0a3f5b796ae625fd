"""lm-eval's tasks by name: what is searched for is what lm-eval finds when it parses all files."""

from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from lm_eval.tasks import TaskManager

from looped_eval.common import task_names
from looped_eval.common.task_names import TASKS, names_in_files, tasks_of


FILES = {
    "plain.yaml": "task: plain-1.5\ntag: one_tag\n",
    "listed.yaml": "tag:\n  - first_tag\n  - second_tag\ntask: listed\n",
    "flow.yaml": "task: in_flow\ntag: [third_tag]\n",
    "quoted.yaml": '"tag": "quoted_tag"\n"task": "quoted"\n',
    "group.yaml": "group: all_of_them\ntask:\n- listed\n- task: quoted\n  num_fewshot: 1\n",
    "included.yaml": "include: _template\ntask: included\n",
    "_template": "tag:\n    - tag_of_a_template\noutput_type: loglikelihood\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_no_name_is_missed(folder):
    known = TaskManager(include_path=str(folder), include_defaults=False).all_tasks
    assert {"plain-1.5", "third_tag", "quoted_tag", "tag_of_a_template", "all_of_them"} <= set(known)
    assert set(known) <= names_in_files([folder])


@pytest.mark.slow
def test_no_name_of_lm_eval_is_missed():
    root = Path(lm_eval.tasks.__file__).parent
    assert set(TaskManager(include_path=str(TASKS)).all_tasks) <= names_in_files([root, TASKS])


@pytest.fixture
def parsed(monkeypatch):
    """Whether lm-eval's own tasks were parsed, for each manager that was made; they are left out."""
    made = []

    def manager(*args, include_defaults=True, **kwargs):
        made.append(include_defaults)
        return TaskManager(*args, include_defaults=False, **kwargs)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    return made


def test_own_tasks_open_alone(parsed):
    manager, names = tasks_of(["looped_offline", "looped_p_hop_1", "looped_offline"], [TASKS])
    assert names == ["looped_offline", "looped_p_hop_1"] and parsed == [False]
    members = yaml.safe_load((TASKS / "_offline.yaml").read_text())["task"]
    assert len(members) == 7 and set(members) <= set(manager.all_tasks)


@pytest.mark.parametrize("name", ["readout_nine_lm_eval", "fully_looped_six_lm_eval", "looped_p_hop_*"])
def test_what_may_need_lm_evals_tasks_opens_them(parsed, monkeypatch, name):
    monkeypatch.setattr(task_names, "refuse_unknown", lambda *_: None)
    tasks_of([name], [TASKS])
    assert parsed == [False, True]


@pytest.mark.parametrize(
    "name, advice",
    [("looped_ofline", "did you mean 'looped_offline'?"), ("xyzzy", "`looped eval ls tasks` lists")],
)
def test_a_name_that_is_nowhere_is_refused_before_files_are_parsed(parsed, monkeypatch, folder, name, advice):
    monkeypatch.setattr(task_names.lm_eval.tasks, "__file__", str(folder / "__init__.py"))  # lm-eval's are many
    with pytest.raises(ValueError, match="no task is called") as error:
        tasks_of(["looped_offline", name], [TASKS])
    assert repr(name) in str(error.value) and advice in str(error.value) and parsed == [False]


def test_a_pattern_that_matches_nothing_is_refused(parsed, monkeypatch, folder):
    monkeypatch.setattr(task_names.lm_eval.tasks, "__file__", str(folder / "__init__.py"))
    with pytest.raises(ValueError, match="no task is called 'zz\\*'"):
        tasks_of(["zz*"], [TASKS])
