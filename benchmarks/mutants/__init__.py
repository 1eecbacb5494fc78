"""Tests of the tests: the code is changed in one place at a time, and the quick tests must notice.

Two tools were tried. mutmut 3 forks from a process that has run tests: JAX has started threads by then, and
forks hang; from its fork server it works, at the price of not changing decorated functions, properties and
constants of modules, which hold half of the rules here. cosmic-ray starts an interpreter for every mutant,
and importing JAX and fald takes longer than most of the tests. So the mutants are made and run by these
files: one process imports every other package once and never computes, and each mutant is a fork of it that
imports fald with one module changed and runs that module's tests.
"""
