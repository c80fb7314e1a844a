"""The tests are grouped as conftest.py asks."""


def test_tests_of_one_file_run_in_one_process(request):
    """With some versions of xdist and pytest, groups are ignored without a word. Then each program
    compiles in every process, and the tests take twice as long."""
    groups = request.node.iter_markers("xdist_group")
    assert [mark.args for mark in groups] == [("test_conftest",)]
    if hasattr(request.config, "workerinput"):  # this process is one of several
        assert request.node.nodeid.endswith("@test_conftest")
