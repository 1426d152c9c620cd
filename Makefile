# The newcomer's door; CMake does the work. Each goal installs what it needs (tools/ensure-deps).
#   make run     build, make input files, run the variants on them, print the table
#   make test    build and pass all tests
#   make check   the rules of the tree: layers, style, lone headers
#   make         build only
JOBS ?= $(shell nproc)

all:
	@tools/ensure-deps run
	@tools/build build $(JOBS)

run: all
	@build/saccade demo

test:
	@tools/ensure-deps test
	@tools/build build $(JOBS)
	@cd build && ctest --output-on-failure -j $(JOBS)

check:
	@tools/ensure-deps check
	@tools/check

clean:
	rm -rf build build-*

.PHONY: all run test check clean
