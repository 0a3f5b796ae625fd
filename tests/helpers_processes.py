"""Other processes: one that knows nothing of this package, and one that is killed at its work."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm


ROOT = Path(__file__).resolve().parent.parent


def import_paths() -> str:
    """PYTHONPATH of a process that is started from here: this tree before what was given already."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_clean(script, *arguments, tmp_path, **environment):
    """A Python that sees neither this working directory nor PYTHONPATH, with an empty cache of remote code."""
    modules = tmp_path / f"modules{len(list(tmp_path.iterdir()))}"
    # one thread here and there: sums split over threads round differently
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                   **environment}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, *arguments],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_and_kill(work, is_time=None) -> bool:
    """`work` in a forked process, killed once `is_time` if that is given; whether it ended by itself."""
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())  # its own is shared with this process, where it would stay taken after a kill
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(1)
    if is_time is not None:
        while not is_time():
            time.sleep(0.001)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before its time"
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)
