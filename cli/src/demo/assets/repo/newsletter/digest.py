import textkit


def line(note):
    return f"* {textkit.cut(note, 20)} ({textkit.words(note)} words)"
