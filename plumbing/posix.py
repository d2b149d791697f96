"""What the training needs of the operating system. Where it is missing, as on Windows, importing
this module ends the program with a line. (The other programs need nothing of it.)"""

import sys

HERE = "python -m plain; one_page.py, data.py, sample.py, hf.py"  # what runs on any system

try:
    import fcntl
    import resource
except ModuleNotFoundError as missing:
    print(
        f"error: this system has no {missing.name}, which the training on several ranks needs: "
        f"use Linux, macOS or WSL. Here you can run: {HERE}",
        file=sys.stderr,
    )
    sys.exit(2)

# ru_maxrss of getrusage() counts these.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
