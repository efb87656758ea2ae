package e2e

import (
	"debug/elf"
	"slices"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestHardening checks the ELF headers of the programs that `make build` makes.
func TestHardening(t *testing.T) {
	t.Run("gpu-cdi-plugin", func(t *testing.T) {
		path := shared.Program(t, "gpu-cdi-plugin")
		f := openELF(t, path)
		if f.Type != elf.ET_DYN || flags(t, f, elf.DT_FLAGS_1)&uint64(elf.DF_1_PIE) == 0 {
			t.Errorf("the file is of type %v and not position independent", f.Type)
		}
		checkReadOnlyAfterStart(t, f)
		if len(values(t, f, elf.DT_TEXTREL)) > 0 || flags(t, f, elf.DT_FLAGS)&uint64(elf.DF_TEXTREL) != 0 {
			t.Error("the program has text relocations")
		}
		// NVML's library is loaded later, so its functions must be bound at the first call.
		if flags(t, f, elf.DT_FLAGS)&uint64(elf.DF_BIND_NOW) != 0 ||
			flags(t, f, elf.DT_FLAGS_1)&uint64(elf.DF_1_NOW) != 0 {
			t.Error("the loader would bind all functions at the start")
		}
		proc.Must(t, 0, proc.Cmd{Args: []string{path, "version"}})
	})
	for _, name := range []string{"prestart-hook", "gpu-sim"} {
		t.Run(name, func(t *testing.T) {
			f := openELF(t, shared.Program(t, name))
			for _, p := range f.Progs {
				if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
					t.Errorf("the program has a %v segment and is not static", p.Type)
				}
			}
		})
	}
}

// openELF opens a program and checks that no memory of it is both writable and executable.
func openELF(t *testing.T, path string) *elf.File {
	t.Helper()
	f, err := elf.Open(path)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	stack := segments(f, elf.PT_GNU_STACK)
	if len(stack) != 1 {
		t.Errorf("%s has no GNU_STACK segment", path)
	}
	for _, p := range append(stack, segments(f, elf.PT_LOAD)...) {
		if p.Flags&elf.PF_W != 0 && p.Flags&elf.PF_X != 0 {
			t.Errorf("%s: the %v segment at %#x is writable and executable", path, p.Type, p.Vaddr)
		}
	}
	return f
}

func segments(f *elf.File, kind elf.ProgType) []*elf.Prog {
	return slices.DeleteFunc(slices.Clone(f.Progs), func(p *elf.Prog) bool { return p.Type != kind })
}

// checkReadOnlyAfterStart checks that the sections that only the loader writes are read-only after the start.
func checkReadOnlyAfterStart(t *testing.T, f *elf.File) {
	t.Helper()
	relro := segments(f, elf.PT_GNU_RELRO)
	if len(relro) != 1 {
		t.Fatalf("there are %d GNU_RELRO segments, want one", len(relro))
	}
	for _, name := range []string{".data.rel.ro", ".dynamic", ".got", ".init_array"} {
		s := f.Section(name)
		if s == nil {
			t.Errorf("there is no section %s", name)
			continue
		}
		if s.Addr < relro[0].Vaddr || s.Addr+s.Size > relro[0].Vaddr+relro[0].Memsz {
			t.Errorf("section %s stays writable", name)
		}
	}
}

// flags are the bits of a dynamic entry, or 0 without one.
func flags(t *testing.T, f *elf.File, tag elf.DynTag) (bits uint64) {
	t.Helper()
	for _, v := range values(t, f, tag) {
		bits |= v
	}
	return bits
}

func values(t *testing.T, f *elf.File, tag elf.DynTag) []uint64 {
	t.Helper()
	list, err := f.DynValue(tag)
	testenv.Must(t, err)
	return list
}
