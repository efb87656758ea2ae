package libtest

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

// TestPrototypes compiles the library's sources with NVIDIA's header. A function whose result or arguments differ from
// its declaration there does not compile.
func TestPrototypes(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "cc")
	include, err := nvmlInclude()
	testenv.Must(t, err)
	for _, source := range librarySources() {
		if filepath.Base(source) == "stubs.c" {
			continue // it omits arguments on purpose
		}
		args := slices.Concat(warnings, []string{
			"-fsyntax-only", "-Wno-deprecated-declarations", "-DNVML_HEADER=<nvml.h>",
			"-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-isystem", include, source,
		})
		if err := cc(args...); err != nil {
			t.Error(err)
		}
	}
}

// TestLayout compares every structure, field and constant of our header with NVIDIA's.
func TestLayout(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "cc")
	include, err := nvmlInclude()
	testenv.Must(t, err)
	dir := t.TempDir()
	program := filepath.Join(dir, "layout.c")
	testenv.Must(t, os.WriteFile(program, layoutProgram(t), 0o644))
	ours := output(t, dir+"/ours", "-I../lib", program)
	theirs := output(t, dir+"/theirs", "-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-I"+include, program)
	if len(ours) < 400 {
		t.Errorf("only %d sizes, offsets and constants compared", len(ours))
	}
	if diff := cmp.Diff(theirs, ours); diff != "" {
		t.Errorf("our header differs from NVIDIA's (-theirs +ours):\n%s", diff)
	}
}

var (
	typeLine  = regexp.MustCompile(`^\} (nvml\w+);`)
	fieldLine = regexp.MustCompile(`^    [\w ]+[ *](\w+)(?:\[\w+\])?;`)
	enumLine  = regexp.MustCompile(`^    (NVML_\w+) = `)
	constLine = regexp.MustCompile(`^#define (\w+) .*`)
)

// layoutProgram returns a C program that prints the layout and value of everything that our headers declare.
func layoutProgram(t *testing.T) []byte {
	t.Helper()
	var b strings.Builder
	b.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include <nvml.h>\nint main(void)\n{\n")
	for _, header := range []string{"nvml.h", "nvml_mig.h", "nvml_values.h"} {
		text, err := os.ReadFile(filepath.Join("../lib", header))
		testenv.Must(t, err)
		var fields []string
		for line := range strings.Lines(string(text)) {
			if m := typeLine.FindStringSubmatch(line); m != nil {
				fmt.Fprintf(&b, "printf(\"sizeof %[1]s %%zu\\n\", sizeof(%[1]s));\n", m[1])
				for _, field := range fields {
					fmt.Fprintf(
						&b,
						"printf(\"%[1]s.%[2]s %%zu %%zu\\n\", offsetof(%[1]s, %[2]s), sizeof(((%[1]s *)0)->%[2]s));\n",
						m[1],
						field,
					)
				}
				fields = nil
			} else if m := enumLine.FindStringSubmatch(line); m != nil {
				writeConstant(&b, m[1])
			} else if m := fieldLine.FindStringSubmatch(line); m != nil {
				fields = append(fields, m[1])
			} else if m := constLine.FindStringSubmatch(line); m != nil && m[1] != "NVML_STRUCT_VERSION" {
				writeConstant(&b, m[1])
			}
		}
	}
	b.WriteString("return 0;\n}\n")
	return []byte(b.String())
}

func writeConstant(b *strings.Builder, name string) {
	fmt.Fprintf(b, "printf(\"%[1]s %%llu\\n\", (unsigned long long)(%[1]s));\n", name)
}

// output compiles a program and returns the lines that it prints.
func output(t *testing.T, program string, args ...string) []string {
	t.Helper()
	testenv.Must(t, cc(slices.Concat([]string{"-w", "-o", program}, args)...))
	out, err := exec.Command(program).Output()
	testenv.Must(t, err)
	return strings.Split(string(out), "\n")
}

var declared = regexp.MustCompile(
	`(?m)^(?:DEPRECATED\([\d.]+\) )?(?:const )?(?:nvmlReturn_t +)?DECLDIR +(?:char\* )?(nvml\w+) *\(`,
)

// TestExports checks that the library exports every function of NVIDIA's header, two of its own, and nothing else.
func TestExports(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "cc")
	include, err := nvmlInclude()
	testenv.Must(t, err)
	header, err := os.ReadFile(filepath.Join(include, "nvml.h"))
	testenv.Must(t, err)
	want := []string{"gpuSimGetBusId", "gpuSimReset"}
	for _, m := range declared.FindAllStringSubmatch(string(header), -1) {
		want = append(want, m[1])
	}
	if n := strings.Count(string(header), ") DECLDIR") +
		strings.Count(string(header), "nvmlReturn_t DECLDIR"); len(want) < n {
		t.Errorf("%d functions found in a header with at least %d declarations", len(want), n)
	}
	slices.Sort(want)
	if diff := cmp.Diff(slices.Compact(want), exported(t)); diff != "" {
		t.Errorf("exported functions (-header +library):\n%s", diff)
	}
}

func exported(t *testing.T) []string {
	t.Helper()
	f, err := elf.Open(compileLibrary(t))
	testenv.Must(t, err)
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	testenv.Must(t, err)
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// TestGenerated checks that the list of stubs is up to date.
func TestGenerated(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "run", "../lib/generate", "-check", "-lib", "../lib").CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
