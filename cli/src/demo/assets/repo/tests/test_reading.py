import unittest

from newsletter import reading


class ReadingTest(unittest.TestCase):
    def test_reading(self):
        self.assertEqual(reading.minutes("word " * 400), 2)
        self.assertEqual(reading.minutes(""), 1)
