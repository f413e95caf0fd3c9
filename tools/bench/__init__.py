"""The bench: `python -m tools.bench` measures the agent beside llama.cpp on the same weights, in one run.

    __main__.py   the benches in their order; the report, the picture and the table are written from their outcomes
    report.py     Row, Outcome, Panel; statistics over rounds; the table
    picture.py    the panels on one page
    question.py   what contenders are asked
    setting.py    what every bench is given; rounds in turn
    ours.py       the agent's decoder, and peer.py llama.cpp, behind the same few methods
    requantise.py the peer's fastest file, made of the same weights
    child.py      a process of its own, for memory and for the start
    machine.py    what it was measured on
    speed.py, limits.py, start.py, memory.py    the benches

A bench is a module with `measure(setting) -> Outcome`; to add one, write it and name it in `BENCHES` of __main__.py.
Noise is met with many short rounds in which all contenders take their turn, so that they see the same machine; a ratio
is the median of the rounds' ratios, and above 1 means that ours is better.
"""
