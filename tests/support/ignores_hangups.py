"""Loaded by the fork server only: under `nohup` the tests go on when their terminal closes, and so must the server."""

import signal

signal.signal(signal.SIGHUP, signal.SIG_IGN)
