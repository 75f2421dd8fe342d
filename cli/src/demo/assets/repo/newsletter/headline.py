import textkit


def make(text):
    return textkit.cut(textkit.title(text), 30)
