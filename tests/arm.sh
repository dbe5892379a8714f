#!/bin/bash
# The kernel tests on ARM without an ARM machine: cross-compiled for three instruction sets and run under qemu.
# It shows that results are right; it says nothing about speed.
set -eu
cd "$(dirname "$0")/.."

CXX=${ARM_CXX:-aarch64-linux-gnu-g++}
CC=${ARM_CC:-aarch64-linux-gnu-gcc}
QEMU=${ARM_QEMU:-$(command -v qemu-aarch64 || command -v qemu-aarch64-static || echo qemu-aarch64)}
for tool in "$CXX" "$CC" "$QEMU"; do
    if ! command -v "$tool" > /dev/null; then
        echo "make arm: $tool is missing, nothing was tested (Debian: g++-aarch64-linux-gnu and qemu-user)"
        exit 0
    fi
done

out=build/arm
mkdir -p $out
tree=$(ls -td build/cp*/llama.cpp 2> /dev/null | head -1 || true)
if [ -z "$tree" ]; then
    tree=$out/llama.cpp
    ${PYTHON:-python3} third_party/fetch.py --dest $tree --no-edits
fi
ggml=$tree/ggml

# of ggml only what packing and reading weights needs; the linker leaves out the rest
include="-I$out -I$ggml/include -I$ggml/src -Icpp/kernels -Itests/cpp"
sed 's/@[A-Z_]*@/0/g' $ggml/src/ggml-version.h.in > $out/ggml-version.h
objects=
for source in ggml.c ggml-quants.c ggml-threading.cpp; do
    case $source in *.c) compile="$CC -D_GNU_SOURCE" ;; *) compile="$CXX -std=c++17" ;; esac
    object=$out/${source%.*}.o
    if [ ! $object -nt $ggml/src/$source ]; then
        $compile -O2 -ffunction-sections -fdata-sections $include -c $ggml/src/$source -o $object
    fi
    objects="$objects $object"
done

flags="-std=c++17 -O3 -ffp-contract=off -static -Wl,--gc-sections -Wall -Wextra -Werror"
flags="$flags -Wno-unused-function -Wno-uninitialized -Wno-maybe-uninitialized"
for arch in armv8-a armv8.2-a+dotprod armv8.6-a+i8mm; do
    for test in test_kernels_isa test_kernels; do
        $CXX $flags -march=$arch $include tests/cpp/$test.cpp cpp/kernels/{pack,quant,gemm}.cpp $objects -lm -o $out/$test
        "$QEMU" -cpu max $out/$test
        echo "make arm: $test passed for $arch"
    done
done
