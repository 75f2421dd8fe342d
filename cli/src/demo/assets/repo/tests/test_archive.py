import unittest

from newsletter import archive


class ArchiveTest(unittest.TestCase):
    def test_archive(self):
        self.assertEqual(archive.path(7, "Hello, World"), "archive/0007-hello-world.md")
