"""A process that compiles rows for one target: Triton keeps one driver, and a compiler that hangs must be ended.

    python worker.py TARGET

Requests and answers are JSON objects, one a line: {"what": method of Compiler, "given": its arguments}, answered by
{"result": ..} or {"error": ..}.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

TESTS = Path(__file__).parent.parent


class Worker:
    """The process, as tests see it. It starts anew after it was ended."""

    def __init__(self, target: str):
        self.target, self.process = target, None

    def ask(self, timeout: float, what: str, **given):
        """``Compiler.<what>(**given)``. Raises ``RuntimeError`` with what went wrong there, or if there is no answer
        within ``timeout`` seconds."""
        if self.process is None:
            self._start()
        print(json.dumps({"what": what, "given": given}), file=self.process.stdin, flush=True)
        try:
            answer = self.answers.get(timeout=timeout)
        except Empty:
            answer = {"error": f"no answer within {timeout:.0f} s: a tile is too large for the compiler?"}
            self.close()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        self.process = subprocess.Popen([sys.executable, __file__, self.target], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.answers = Queue()
        Thread(target=self._read, args=(self.process, self.answers), daemon=True).start()

    def _read(self, process, answers):
        for line in process.stdout:
            answers.put(json.loads(line))
        answers.put({"error": f"the compiler ended with status {process.wait()}"})
        self.process = None


def serve(target: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a compiler prints is no answer
    from compile.compiler import Compiler

    compiler = Compiler(target)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(compiler, request["what"])(**request["given"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
