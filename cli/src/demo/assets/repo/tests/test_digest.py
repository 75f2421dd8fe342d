import unittest

from newsletter import digest


class DigestTest(unittest.TestCase):
    def test_digest(self):
        self.assertTrue(digest.line("one two three four five six").startswith("* one two three"))
        self.assertTrue(digest.line("one two three four five six").endswith("(6 words)"))
