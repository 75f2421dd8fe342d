import textkit


def fits(text, limit):
    return textkit.words(text) <= limit
