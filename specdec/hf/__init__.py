"""What specdec takes from `transformers` beside its documented interface: names that a release may
change, a file for each thing that has them. Read in the versions of `versions.TRIED`;
`tests/targets/test_hf_names.py` compares them with the installed version and names what is new
there.
"""
