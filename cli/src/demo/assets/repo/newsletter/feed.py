import textkit


def entry(subject, body):
    return {"id": textkit.slug(subject), "title": textkit.title(subject), "summary": textkit.cut(body, 40)}
