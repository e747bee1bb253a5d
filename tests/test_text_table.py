"""Plain text tables. The example in the docstring cannot tell spaces, which doctest is told to ignore."""

from balnorm.text_table import text_table


def test_columns_of_numbers_stand_to_the_right_and_others_to_the_left():
    rows = [["a", "1e+03", "5%", "2x", "", "1 s"], ["long name", "-12", "12.5%", "+10x", "1,024", ""]]
    assert text_table(["name", "number", "share", "times", "some", "time"], rows).splitlines() == [
        "name       number  share  times   some  time",
        "---------  ------  -----  -----  -----  ----",
        "a           1e+03     5%     2x         1 s",
        "long name     -12  12.5%   +10x  1,024",
    ]
    assert text_table(["a", "b"], []) == "a  b\n-  -"
