"""From the start of a process to its first token: imports, model, warm-up, short question; files in the page cache."""

from tools.bench.child import spawn
from tools.bench.jobs import Jobs
from tools.bench.picture import bars
from tools.bench.report import Outcome, Panel, compare, middle
from tools.bench.setting import Setting, in_turn, threads_text


def measure(setting: Setting) -> Outcome:
    threads = setting.threads[-1]
    jobs = Jobs(setting, threads)
    if not setting.cache.exists():
        spawn(jobs.ours)  # packs the weights
    name = f"first token after start, {threads_text(threads)}"
    values = in_turn(name, [jobs.ours, *jobs.peers], setting.pick(3, 1), lambda job: spawn(job).first_s)
    values |= jobs.absent
    medians = {"": {label: middle(times) for label, times in values.items()}}
    panel = Panel("First token after the start of the process, s (lower is better)", lambda axes: bars(axes, medians))
    return Outcome(compare(name, "s", values), [panel])
