#!/usr/bin/python3
"""One write to sysfs, with what a shell's `echo` hides: its errno, when it began, how long it took.

write_sysfs.py PATH TEXT      prints {"began", "seconds", "errno": name or null}
"""

import errno
import json
import os
import sys
import time


def main() -> None:
    path, text = sys.argv[1:]
    began = time.monotonic()
    answer = None
    try:
        file = os.open(path, os.O_WRONLY)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
    except OSError as error:
        answer = errno.errorcode.get(error.errno or 0, str(error.errno))
    ended = time.monotonic()
    print(json.dumps({"began": began, "seconds": round(ended - began, 4), "errno": answer}))


if __name__ == "__main__":
    main()
