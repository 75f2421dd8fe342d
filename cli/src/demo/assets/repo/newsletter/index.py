import textkit


def table(subjects):
    return [(textkit.slug(s), textkit.title(s)) for s in sorted(subjects)]
