"""textkit 2.0: the names of 1.x are gone, arguments are by keyword, and an ellipsis is one character."""
import re

VERSION = "2.0"


def slugify(text, *, separator="-"):
    return re.sub(r"[^a-z0-9]+", separator, text.lower()).strip(separator)


def truncate(text, *, width):
    return text if len(text) <= width else text[: width - 1].rstrip() + "\u2026"


def word_count(text):
    return len(text.split())


def title_case(text):
    return " ".join(w[:1].upper() + w[1:] for w in text.split())
