package sim

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
)

// Library is a shared library without code that the loader accepts, like most libraries of a simulated driver.
type Library struct {
	// SONAME is the library's own name; empty omits it.
	SONAME string
	// Needed are the names of the libraries that it needs.
	Needed []string
	// Note is an ELF note, or nil.
	Note *Note
	// Arch is a GOARCH, amd64 or arm64; empty means the running program's.
	Arch string
}

// Note is an ELF note in a section of its own.
type Note struct {
	Section string // such as ".note.cuda.fwd_compatibility"
	Name    string
	Type    uint32
	Desc    []byte
}

// WriteELF writes the library to a file with mode 0755.
func (l Library) WriteELF(path string) error {
	data, err := l.ELF()
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o755)
}

// segmentAlign is the largest page size, used on some arm64 machines, so that segments are on different pages.
const segmentAlign = 0x10000

// ELF returns the library's file. The same library always gives the same bytes.
func (l Library) ELF() ([]byte, error) {
	machine, err := elfMachine(l.Arch)
	if err != nil {
		return nil, err
	}
	strings := stringTable{0}
	dynamic := []elf.Dyn64{}
	for _, name := range l.Needed {
		dynamic = append(dynamic, elf.Dyn64{Tag: int64(elf.DT_NEEDED), Val: strings.add(name)})
	}
	if l.SONAME != "" {
		dynamic = append(dynamic, elf.Dyn64{Tag: int64(elf.DT_SONAME), Val: strings.add(l.SONAME)})
	}
	programs := 4
	if l.Note != nil {
		programs++
	}
	w := &elfWriter{names: stringTable{0}, sections: []elf.Section64{{}}}
	w.skip(elfHeaderSize + programs*elfProgramSize)
	if l.Note != nil {
		w.section(l.Note.Section, elf.SHT_NOTE, elf.SHF_ALLOC, l.Note.bytes(), elf.Section64{Addralign: 4})
	}
	// The loader requires at least a hash table of one bucket with an empty chain, and the null symbol.
	hash := w.section(".hash", elf.SHT_HASH, elf.SHF_ALLOC, words(1, 1, 0, 0), elf.Section64{Entsize: 4})
	symbols := w.section(".dynsym", elf.SHT_DYNSYM, elf.SHF_ALLOC, make([]byte, elf.Sym64Size),
		elf.Section64{Entsize: elf.Sym64Size, Info: 1})
	names := w.section(".dynstr", elf.SHT_STRTAB, elf.SHF_ALLOC, strings, elf.Section64{Addralign: 1})
	w.sections[hash].Link, w.sections[symbols].Link = symbols, names
	w.writable = segmentAlign // the loader writes to the dynamic section
	dynamic = append(dynamic,
		elf.Dyn64{Tag: int64(elf.DT_HASH), Val: w.sections[hash].Addr},
		elf.Dyn64{Tag: int64(elf.DT_SYMTAB), Val: w.sections[symbols].Addr},
		elf.Dyn64{Tag: int64(elf.DT_SYMENT), Val: elf.Sym64Size},
		elf.Dyn64{Tag: int64(elf.DT_STRTAB), Val: w.sections[names].Addr},
		elf.Dyn64{Tag: int64(elf.DT_STRSZ), Val: uint64(len(strings))},
		elf.Dyn64{Tag: int64(elf.DT_NULL)})
	dyn := w.section(".dynamic", elf.SHT_DYNAMIC, elf.SHF_ALLOC|elf.SHF_WRITE, encode(dynamic),
		elf.Section64{Link: names, Entsize: 16})
	return w.finish(elf.ET_DYN, machine, 0, l.programs(w, dyn)), nil
}

// programs returns the program headers: what is loaded, and where the loader finds its tables.
func (l Library) programs(w *elfWriter, dynamic uint32) []elf.Prog64 {
	dyn := w.sections[dynamic]
	list := []elf.Prog64{
		segment(elf.PT_LOAD, elf.PF_R, elf.Section64{Size: dyn.Off}, segmentAlign),
		segment(elf.PT_LOAD, elf.PF_R|elf.PF_W, dyn, segmentAlign),
		segment(elf.PT_DYNAMIC, elf.PF_R|elf.PF_W, dyn, 8),
		segment(elf.PT_GNU_STACK, elf.PF_R|elf.PF_W, elf.Section64{}, 16),
	}
	if l.Note != nil {
		list = append(list, segment(elf.PT_NOTE, elf.PF_R, w.sections[1], 4))
	}
	return list
}

func (n *Note) bytes() []byte {
	name := append([]byte(n.Name), 0)
	out := words(uint32(len(name)), uint32(len(n.Desc)), n.Type)
	return pad(append(pad(append(out, name...), 4), n.Desc...), 4)
}

// exitProgram returns a static program that exits with status 0.
func exitProgram(arch string) ([]byte, error) {
	machine, err := elfMachine(arch)
	if err != nil {
		return nil, err
	}
	code := []byte{0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05} // mov $60,%eax; xor %edi,%edi; syscall
	if machine == elf.EM_AARCH64 {
		code = words(0xd2800000, 0xd2800ba8, 0xd4000001) // mov x0,#0; mov x8,#93; svc #0
	}
	const base = 0x400000
	w := &elfWriter{names: stringTable{0}, sections: []elf.Section64{{}}, writable: base}
	w.skip(elfHeaderSize + 2*elfProgramSize)
	text := w.section(".text", elf.SHT_PROGBITS, elf.SHF_ALLOC|elf.SHF_EXECINSTR, code, elf.Section64{})
	entry := w.sections[text].Addr
	whole := elf.Section64{Addr: base, Size: entry - base + uint64(len(code))}
	return w.finish(elf.ET_EXEC, machine, entry, []elf.Prog64{
		segment(elf.PT_LOAD, elf.PF_R|elf.PF_X, whole, segmentAlign),
		segment(elf.PT_GNU_STACK, elf.PF_R|elf.PF_W, elf.Section64{}, 16),
	}), nil
}

func elfMachine(arch string) (elf.Machine, error) {
	if arch == "" {
		arch = runtime.GOARCH
	}
	switch arch {
	case "amd64":
		return elf.EM_X86_64, nil
	case "arm64":
		return elf.EM_AARCH64, nil
	}
	return 0, fmt.Errorf("cannot make ELF files for %s, only for amd64 and arm64", arch)
}

// Sizes of an ELF64 file's headers, in bytes.
const (
	elfHeaderSize  = 64
	elfProgramSize = 56
	elfSectionSize = 64
)

// elfWriter builds a file section by section.
type elfWriter struct {
	data     []byte
	names    stringTable
	sections []elf.Section64
	writable uint64 // address minus offset of the following sections
}

func (w *elfWriter) skip(n int) { w.data = append(w.data, make([]byte, n)...) }

// section appends a section and returns its index. more has the fields except name, type, flags, offset, address and
// size.
func (w *elfWriter) section(
	name string, kind elf.SectionType, flags elf.SectionFlag, data []byte, more elf.Section64,
) uint32 {
	w.data = pad(w.data, 8)
	if more.Addralign == 0 {
		more.Addralign = 8
	}
	more.Name, more.Type, more.Flags = uint32(w.names.add(name)), uint32(kind), uint64(flags)
	more.Off, more.Size = uint64(len(w.data)), uint64(len(data))
	if flags&elf.SHF_ALLOC != 0 {
		more.Addr = more.Off + w.writable
	}
	w.data = append(w.data, data...)
	w.sections = append(w.sections, more)
	return uint32(len(w.sections) - 1)
}

// finish adds the section headers and fills in the headers at the beginning.
func (w *elfWriter) finish(kind elf.Type, machine elf.Machine, entry uint64, programs []elf.Prog64) []byte {
	const own = ".shstrtab"
	table := append(append(bytes.Clone(w.names), own...), 0) // the table contains its own name
	last := w.section(own, elf.SHT_STRTAB, 0, table, elf.Section64{Addralign: 1})
	w.data = pad(w.data, 8)
	h := elf.Header64{
		Type: uint16(kind), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT), Entry: entry,
		Phoff: elfHeaderSize, Shoff: uint64(len(w.data)), Ehsize: elfHeaderSize,
		Phentsize: elfProgramSize, Phnum: uint16(len(programs)),
		Shentsize: elfSectionSize, Shnum: uint16(len(w.sections)), Shstrndx: uint16(last),
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB)
	h.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	copy(w.data, append(encode(h), encode(programs)...))
	return append(w.data, encode(w.sections)...)
}

// segment returns a program header for the range of a section.
func segment(kind elf.ProgType, flags elf.ProgFlag, s elf.Section64, align uint64) elf.Prog64 {
	return elf.Prog64{
		Type: uint32(kind), Flags: uint32(flags), Off: s.Off, Vaddr: s.Addr, Paddr: s.Addr,
		Filesz: s.Size, Memsz: s.Size, Align: align,
	}
}

// stringTable is an ELF string table. Its first string is empty.
type stringTable []byte

func (t *stringTable) add(s string) uint64 {
	at := len(*t)
	*t = append(append(*t, s...), 0)
	return uint64(at)
}

func words(list ...uint32) []byte { return encode(list) }

// encode returns numbers in little-endian order. It cannot fail for values of fixed size.
func encode(v any) []byte {
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, v)
	return b.Bytes()
}

func pad(data []byte, align int) []byte {
	for len(data)%align != 0 {
		data = append(data, 0)
	}
	return data
}
