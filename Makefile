# The newcomer's door; CMake does the work. Each goal installs what it needs (tools/ensure-deps).
#   make run     build the program, make input files, run the variants on them, print the table
#   make test    build everything and pass all tests
#   make check   the rules of the tree: layers, style, links, lone headers
#   make docs    all pages and the references of C and Python in build-docs/html/index.html
#   make         build everything
JOBS ?= $(shell nproc)

all:
	@tools/ensure-deps run
	@tools/build build $(JOBS)

run:
	@tools/ensure-deps run
	@TARGETS=saccade_program tools/build build $(JOBS)
	@build/saccade demo

test:
	@tools/ensure-deps test
	@tools/build build $(JOBS)
	@cd build && ctest --output-on-failure -j $(JOBS)

check:
	@tools/ensure-deps check
	@tools/check

docs:
	@tools/ensure-deps docs
	@doxygen docs/Doxyfile
	@echo "build-docs/html/index.html"

clean:
	rm -rf build build-*

.PHONY: all run test check docs clean
