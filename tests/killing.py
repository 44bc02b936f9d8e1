"""Kills a command at a moment that a file tells."""

import os
import signal
import subprocess
import time


def kill_when(file, command):
    """Start a command, and kill it and its children by SIGKILL as soon as a file exists."""
    job = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while not file.exists() and job.poll() is None:
        time.sleep(0.005)
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
