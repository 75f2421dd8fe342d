import textkit


def path(issue, subject):
    return f"archive/{issue:04d}-{textkit.slug(subject)}.md"
