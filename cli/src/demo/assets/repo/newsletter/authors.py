import textkit


def display(name):
    return textkit.title(name)


def key(name):
    return textkit.slug(name, "_")
