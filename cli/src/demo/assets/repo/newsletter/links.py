import textkit


def anchor(heading):
    return "#" + textkit.slug(heading)
