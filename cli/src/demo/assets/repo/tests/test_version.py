import pathlib
import unittest

import newsletter  # noqa: F401  (puts the vendored package on the path)
import textkit


class VersionTest(unittest.TestCase):
    def test_the_version_in_use_is_the_one_asked_for(self):
        wanted = pathlib.Path(__file__).resolve().parent.parent.joinpath("requirements.txt").read_text().strip()
        self.assertEqual(f"textkit=={textkit.VERSION}", wanted)
