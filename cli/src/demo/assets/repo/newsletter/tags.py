import textkit


def clean(tags):
    return sorted({textkit.slug(t) for t in tags})
