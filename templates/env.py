# python3 env.py - PROGRAM ARGUMENT…     becomes the container runtime
# python3 env.py PID NSENTER PROGRAM ARGUMENT…   becomes what enters a container
#
# Written by knoc: env.pl for machines without perl.

import os
import re
import subprocess
import sys

pid, argv = sys.argv[1], [os.fsencode(a) for a in sys.argv[2:]]
env = dict(os.environb)

if pid == "-":
    if b"TMPDIR" in env:
        env.setdefault(b"APPTAINER_TMPDIR", env[b"TMPDIR"])
    env = {k: v for k, v in env.items() if re.match(rb"(PATH|HOME)$|KNOC_ENV_|APPTAINER|SINGULARITY", k)}
    own = b"SINGULARITYENV_" if any(k.startswith(b"SINGULARITYENV_") for k in env) else b"APPTAINERENV_"
    env.setdefault(own + b"USER_PATH", b"")  # the runtime's copy of this PATH
    for key in [k for k in env if k.startswith(b"KNOC_ENV_")]:
        env[bytes.fromhex(key[9:].decode())] = env.pop(key)
    if b"--containall" in argv:
        i = argv.index(b"--containall")
        argv[i:i + 1] = [b"--contain", b"--ipc", b"--pid"]
else:
    nsenter = argv.pop(0)
    path = "/proc/%s/environ" % pid
    try:
        with open(path, "rb") as f:
            text = f.read()
    except OSError:
        text = subprocess.run([nsenter, "-U", "-t", pid, "--", "cat", path], stdout=subprocess.PIPE).stdout
    for entry in text.split(b"\0"):
        name, found, value = entry.partition(b"=")
        shells = re.match(rb"[A-Za-z_][A-Za-z0-9_]*$", name)
        others = re.match(rb"(BASHOPTS|BASH_VERSINFO|EUID|OPTIND|PPID|SHELLOPTS|UID|PERL[A-Z0-9_]*|PYTHON[A-Z0-9_]*)$", name)
        if found and (others or not shells):
            env[name] = value

try:
    os.execvpe(argv[0], argv, env)
except OSError as e:
    sys.stderr.write("knoc: %s: %s\n" % (os.fsdecode(argv[0]), e.strerror))
    sys.exit(125)
