import unittest

from newsletter import index


class IndexTest(unittest.TestCase):
    def test_index(self):
        self.assertEqual(index.table(["b c", "a"]), [("a", "A"), ("b-c", "B C")])
