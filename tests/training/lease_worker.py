"""A process that takes random devices again and again and writes down when it held which."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from saturn_airflow.launch import leases


def main() -> None:
    folder, seed, devices, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    random.seed(seed)
    names = [f"d{i}" for i in range(devices)]
    log = os.open(folder / f"log-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(turns):
        wanted = random.sample(names, random.randint(1, devices))
        count = random.choice([None, random.randint(1, len(wanted))])
        priority = (float(random.randint(0, 2)), random.randint(0, 9))
        waiter = leases.Waiter(
            wanted, f"worker {seed}", count=count, priority=priority, folder=folder / "leases"
        )
        # Looks far more often than acquire() does, for the sake of collisions.
        while (lease := waiter.take()) is None:
            time.sleep(random.uniform(0, 0.002))
        with lease:
            os.write(log, f"take {time.monotonic_ns()} {' '.join(lease.devices)}\n".encode())
            time.sleep(random.uniform(0, 0.002))
            os.write(log, f"give {time.monotonic_ns()} {' '.join(lease.devices)}\n".encode())


if __name__ == "__main__":
    main()
