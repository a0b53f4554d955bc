"""The work of a call, counted in steps of the interpreter: the same on any machine and under any load."""

import sys


def steps_of(work):
    """Instructions that a call runs in Python code. C code, such as a sort, counts as one."""
    steps = 0

    def trace(frame, event, _argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    # Python 3.12 reports opcodes only where a frame has requested them before.
    sys._getframe().f_trace_opcodes = True
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps
