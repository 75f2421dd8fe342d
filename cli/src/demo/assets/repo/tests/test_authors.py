import unittest

from newsletter import authors


class AuthorsTest(unittest.TestCase):
    def test_authors(self):
        self.assertEqual(authors.display("ada lovelace"), "Ada Lovelace")
        self.assertEqual(authors.key("Ada Lovelace"), "ada_lovelace")
