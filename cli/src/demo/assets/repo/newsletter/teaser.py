import textkit


def make(body):
    first = body.split("\n")[0]
    return textkit.cut(first, 60)
