"""textkit 1.4: small text helpers."""
import re

VERSION = "1.4"


def slug(s, sep="-"):
    return re.sub(r"[^a-z0-9]+", sep, s.lower()).strip(sep)


def cut(s, n):
    return s if len(s) <= n else s[: n - 3].rstrip() + "..."


def words(s):
    return len(s.split())


def title(s):
    return " ".join(w[:1].upper() + w[1:] for w in s.split())
