package libtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// malformed are descriptions and state files with errors.
var malformed = map[string]string{
	"nothing":                "",
	"no line end":            "gpu index=0 uuid=GPU-x",
	"only a NUL":             "\x00",
	"only spaces":            "   \n \t \r\n\n\n",
	"bytes that are no text": "\xff\xfe\x00\x01gpu index=0\n\x80\x81\n",
	"a line without an end":  strings.Repeat("x", 100_000),
	"a value of 100 kB":      "gpu index=0 uuid=" + strings.Repeat("A", 100_000) + "\n",
	"a value of 96 characters": "gpu index=0 uuid=" + strings.Repeat("A", 96) + " serial=" + strings.Repeat("1", 30) +
		"\n",
	"10,000 keys":             "gpu index=0 " + strings.Repeat("k=v ", 10_000) + "\n",
	"10,000 lines":            strings.Repeat("gpu index=0\n", 10_000),
	"10,000 MIG devices":      manyLines("mig gpu=3 uuid=MIG-x gi=1 ci=1 index=", 10_000),
	"10,000 faults":           strings.Repeat("fault function=nvmlDeviceGetNoSuchThing return=1\n", 10_000),
	"10,000 events":           manyLines("event gpu=0 type=8 seq=", 10_000),
	"escapes cut off":         "gpu index=0 name=%\ngpu index=0 name=%4\ngpu index=0 name=%zz%00%",
	"keys without values":     "gpu = == index index= =0 uuid\n",
	"numbers that do not fit": "gpu index=4294967296 minor=99999999999999999999 memory=-1 power=1e9 arch=0x\n",
	"indices out of range": "gpu index=64\nmig gpu=64 index=0 uuid=x\nlink a=0 b=64 pcie=pix\n" +
		"link a=-1 b=0 pcie=pix\nnvlink gpu=0 port=36 remote=0000:01:00.0\nmig gpu=0 index=0 uuid=x gi=64 ci=16\n",
	"PCI addresses": "gpu index=0 bus=\ngpu index=0 bus=zz\ngpu index=0 bus=0000:1b:ff.9\n" +
		"gpu index=0 bus=0:0:0.0\ngpu index=0 bus=ffffffff:ff:1f.7\n",
	"links to itself":    "link a=0 b=0 pcie=psb\nnvlink gpu=0 port=0 remote=0000:1b:00.0 type=gpu\n",
	"a format in a name": "gpu index=0 name=%25s%25n%25s uuid=%25n\n",
	"unknown records":    "fork bomb=1\n= = =\ngpusim 2\n",
	"profiles of zero": "migprofile gpu=3 id=19 enum=0 slices=0 size=0 limit=0\n" +
		"migprofile gpu=3 id=9 slices=0 size=4294967295 starts=4294967295,99999999999999999999,\n",
	"instances of zero": "mig gpu=3 index=0 uuid=x gi=2 ci=0 giprofile=9 ciprofile=0 gislices=0 cislices=0 " +
		"start=4294967295 size=4294967295 memory=18446744073709551615 gicap=4294967295 cicap=4294967295\n",
}

func manyLines(prefix string, n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(prefix + strings.Repeat("9", i%12) + string(rune('0'+i%10)) + "\n")
	}
	return b.String()
}

// sizedArrays are functions whose second argument is the length of an array. The sweep does not know the types of
// arguments and would give a wrong length. nvmlShutdown would end the sweep.
var sizedArrays = []string{
	"nvmlDeviceGetCpuAffinity", "nvmlDeviceGetCpuAffinityWithinScope", "nvmlDeviceGetMemoryAffinity",
	"nvmlDeviceGetFieldValues", "nvmlShutdown",
}

var defined = regexp.MustCompile(`(?m)^(?:NVML_API nvmlReturn_t |PROCESS_LIST\()(nvml\w+)(, |\(nvmlDevice_t )?`)

// sweepable are the simulated functions without sizedArrays. An @ after the name marks a first argument that is a
// device.
func sweepable(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, source := range librarySources() {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range defined.FindAllStringSubmatch(string(text), -1) {
			name := m[1]
			if slices.Contains(sizedArrays, name) {
				continue
			}
			if m[2] != "" {
				name += "@"
			}
			names = append(names, name)
		}
	}
	if len(names) < 150 {
		t.Fatalf("only %d functions found", len(names))
	}
	return names
}

// TestMalformedState calls every function with malformed arguments and a malformed state file.
func TestMalformedState(t *testing.T) {
	t.Parallel()
	names := sweepable(t)
	n := newTestNode(t, asan)
	run(t, n.probe(t, "sweep", names...))
	for name, text := range malformed {
		t.Run(name, func(t *testing.T) {
			n.setState(t, text)
			run(t, n.probe(t, "sweep", names...))
		})
	}
}

// TestMalformedDescription does the same with malformed descriptions, and with some that are malformed at the end.
func TestMalformedDescription(t *testing.T) {
	t.Parallel()
	names := sweepable(t)
	for name, text := range malformed {
		t.Run(name, func(t *testing.T) {
			for _, description := range []string{text, "gpusim 1\n" + text, testMachine + text} {
				n := newNode(t, asan, description[:min(len(description), 256<<10)])
				n.addNodes(t, testMachineNodes...)
				run(t, n.probe(t, "sweep", names...))
			}
		})
	}
}

// TestUnreadableState checks that a state file that cannot be read is ignored.
func TestUnreadableState(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a directory":             func(path string) error { return os.Mkdir(path, 0o755) },
		"a link to nowhere":       func(path string) error { return os.Symlink("nowhere", path) },
		"a link to itself":        func(path string) error { return os.Symlink("state", path) },
		"a FIFO without a writer": func(path string) error { return exec.Command("mkfifo", path).Run() },
		"without permission": func(path string) error {
			return os.WriteFile(path,
				[]byte("fault gpu=0 kind=gone\n"), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestNode(t, asan)
			if err := make(n.statePath()); err != nil {
				t.Fatal(err)
			}
			run(t, asNobody(n.probe(t, "enumerates", "0", "5", "2", "3")))
		})
	}
}

// TestMutations reads many texts that differ from a valid one by a few mutations.
func TestMutations(t *testing.T) {
	t.Parallel()
	asan.dir(t)
	rounds := "5000"
	if testing.Short() {
		rounds = "1000"
	}
	program, machine := filepath.Join(t.TempDir(), "fuzz"), filepath.Join(t.TempDir(), "machine")
	args := slices.Concat(warnings, asan.flags, []string{"-o", program, "testdata/fuzz.c"}, librarySources())
	if err := cc(append(args, "-lpthread", "-ldl")...); err != nil {
		t.Fatal(err)
	}
	text := testMachine +
		"fault gpu=1 kind=lost\nfault function=nvmlInit gpu=2 return=9\nlatency ns=5\nclearmig gpu=3\n"
	if err := os.WriteFile(machine, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, seed := range []string{"1", "2"} {
		if out, err := exec.Command(program, rounds, seed, machine).CombinedOutput(); err != nil {
			t.Errorf("seed %s: %v\n%s", seed, err, out)
		}
	}
}
