import triton

from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2


def test_they_are_triton_s():
    for number in (*range(1, 300), 2**15, 2**15 + 1, 2**31 - 1):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 3, 64, 4096):
            assert cdiv(number, divisor) == triton.cdiv(number, divisor)
    assert cdiv(0, 64) == 0
