from kernel import kernel

from veriformer.properties import parametrize

test_kernel = parametrize(kernel, profile="quick")
