"""One node, relaxed: can its devices share these jobs at all, whenever each device runs what it runs?

A job under a mode of g devices and r seconds then puts r seconds on each of g devices, at any time; a
*pattern* is the set of jobs that one device runs, and no pattern takes longer than the device has. Where no
patterns run every job on as many devices as its mode asks for, no schedule does.

The jobs' least areas leave so many device-seconds of *slack*. A device that is not full wastes what it
lacks, and a mode that is not the thriftiest the rest of its area; when the slack is used up, the branch
ends. So patterns fill devices nearly to the brim, and near the optimum there are only a few of them, while
there are thousands of orders in which to schedule the same jobs. This is bin completion for bin packing
(Korf, "A new algorithm for optimal bin packing", 2002), with jobs that want several bins at once and have a
choice of sizes.

Of solutions that differ in the order of equal devices or of equal jobs, only the first is looked for:
between equal devices, patterns (as rows of zeros and ones over the jobs) descend; of equal jobs, the first
starts first.
"""

from __future__ import annotations

import numpy as np

from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.instances.arrays import Floats, Ints

POSSIBLE, REFUTED, UNKNOWN = 1, 0, -1
#: A pattern is one number of 64 bits, a bit for each job; signed, so that no more than 63 are of use.
MOST_JOBS = 60
MOST_DEVICES = 64
#: Of the seconds of the device that has most. Sums are rounded: in doubt a pattern counts as possible, since
#: what is refuted here is never looked at again.
_TOLERANCE = 1e-9
#: What was tried last at a level, where it is no mode's number: nothing, going on without the job, or all
#: there is.
_UNTRIED, _LAST, _OUT_OF_OPTIONS = -1, 1 << 20, 1 << 21
#: What a level did to its job, which is taken back when the search returns to it: nothing, chose the job's
#: mode and put its first copy on the device, or put another copy there.
_NOTHING, _STARTED, _CONTINUED = 0, 1, 2


@compiled
def share(
    capacities: Floats,
    devices: Ints,
    seconds: Floats,
    areas: Floats,
    jobs: Ints,
    count: int,
    slack: float,
    effort: int,
) -> int:
    """Whether patterns exist: POSSIBLE, REFUTED, or UNKNOWN after ``effort`` steps.

    :param capacities: (G,) seconds that each device has left, ascending.
    :param devices: (classes, most modes), see :class:`arrays.Modes`.
    :param seconds: likewise.
    :param areas: (classes,) least device-seconds of a job in time.
    :param jobs: the class of each of ``count`` jobs, equal ones next to each other; at most MOST_JOBS.
    :param slack: device-seconds that may be wasted.

    A depth-first search without recursion: ``level`` goes one deeper with each decision, and one back when
    nothing is left to try; arrays by level hold what each was when it was entered.
    """
    width, most = len(capacities), devices.shape[1]
    tolerance = _TOLERANCE * capacities[-1]
    # A job's copies are the devices it still wants, once its mode is chosen; -1 before. It lasts the seconds
    # of that mode; at the longest, those of the longest mode that the slack allows.
    copies, lasts = np.zeros(count, np.int64), np.zeros(count)
    longest = np.zeros(count)
    for job in range(count):
        k, copies[job] = jobs[job], -1
        for m in range(most):
            if (
                seconds[k, m] <= capacities[-1]
                and devices[k, m] * seconds[k, m] <= areas[k] + slack + tolerance
            ):
                longest[job] = max(longest[job], seconds[k, m])
    # Level (device, job) decides on one job for one device; (device, count) closes the device. Its load are
    # the seconds the device has so far, left is the slack that is left.
    levels = width * (count + 1) + 1
    load, left = np.zeros(levels), np.zeros(levels)
    pattern, option, did = np.zeros(levels, np.int64), np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    # (device, job): the most seconds that this job and those after it can still add to the device.
    could = np.zeros((width, count + 1))
    # By device: the job that it has to run (-1 for any), and the pattern it was closed with.
    lead, chosen = np.zeros(width, np.int64), np.zeros(width, np.int64)
    level, steps, entering = 0, 0, True
    left[0] = slack
    while level >= 0:
        device, job = level // (count + 1), level % (count + 1)
        if entering:
            steps += 1
            if steps > effort:
                return UNKNOWN
            entering = False
            option[level], did[level] = _UNTRIED, _NOTHING
            if job == 0:
                first = 0
                while first < count and copies[first] == 0:
                    first += 1
                if first == count:
                    return POSSIBLE
                if device == width:
                    level -= 1
                    continue
                load[level], pattern[level] = 0.0, 0
                # Capacities ascend. Where all devices left are equal, the first job that is not done may as
                # well be on this one.
                lead[device] = first if capacities[device] == capacities[-1] else -1
                could[device, count] = 0.0
                for other in range(count - 1, -1, -1):
                    # A job that wants more copies than there are devices left: this branch is dead.
                    if copies[other] > width - device:
                        option[level] = _OUT_OF_OPTIONS
                    more = (
                        longest[other] if copies[other] < 0 else (lasts[other] if copies[other] > 0 else 0.0)
                    )
                    could[device, other] = could[device, other + 1] + more
            # Even with all that can be added, the device wastes more than is allowed.
            missing = capacities[device] - load[level]
            if missing - could[device, job] > left[level] + tolerance:
                option[level] = _OUT_OF_OPTIONS
            elif job == count:
                # The device is closed, if its pattern is no larger than that of an equal one before it.
                option[level] = _OUT_OF_OPTIONS
                equal = device > 0 and capacities[device - 1] == capacities[device]
                if not equal or pattern[level] <= chosen[device - 1]:
                    chosen[device] = pattern[level]
                    # By the tolerance a device may be overfull: that gives nothing back to the slack.
                    left[level + 1] = left[level] - max(0.0, missing)
                    level, entering = level + 1, True
                    continue
        # Back from deeper levels, without success: take back what was tried last, and try the next.
        if did[level] != _NOTHING:
            copies[job] = copies[job] + 1 if did[level] == _CONTINUED else -1
            did[level] = _NOTHING
        if option[level] >= _LAST:
            level -= 1
            continue
        k, takes, spent, advance = 0, 0.0, 0.0, False
        room = capacities[device] - load[level] + tolerance
        if copies[job] < 0:
            k = jobs[job]
            # Of equal jobs the first starts first.
            waits = job > 0 and jobs[job - 1] == k and copies[job - 1] < 0
            m = option[level] + 1
            while m < most and not waits:
                takes = seconds[k, m]
                if takes <= room and devices[k, m] <= width - device:
                    spent = devices[k, m] * takes - areas[k]
                    if spent <= left[level] + tolerance:
                        copies[job], lasts[job], did[level] = devices[k, m] - 1, takes, _STARTED
                        option[level], advance = m, True
                        break
                m += 1
        elif copies[job] > 0 and option[level] == _UNTRIED and lasts[job] <= room:
            takes = lasts[job]
            copies[job] -= 1
            option[level], did[level], advance = 0, _CONTINUED, True
        if advance:
            # The first job has the highest bit, so numbers compare as rows of zeros and ones do.
            pattern[level + 1] = pattern[level] | (1 << (count - 1 - job))
        else:
            # Go on without this job on this device, unless the device has to run it or all devices left do.
            option[level] = _LAST
            if job == lead[device] or copies[job] == width - device:
                level -= 1
                continue
            takes = spent = 0.0
            pattern[level + 1] = pattern[level]
        load[level + 1], left[level + 1] = load[level] + takes, left[level] - spent
        level, entering = level + 1, True
    return REFUTED
