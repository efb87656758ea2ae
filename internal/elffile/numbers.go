package elffile

import "strconv"

// The first bytes of a file, and the values of the next three.
const (
	magic     = "\x7fELF"
	identSize = 16

	class32, class64        = 1, 2
	littleEndian, bigEndian = 1, 2
	version                 = 1
)

// The sizes in bytes of a 64-bit file's structures.
const (
	headerSize     = 64
	programSize    = 56
	sectionSize    = 64
	entrySize      = 16 // of the dynamic table
	noteHeaderSize = 12
)

// noteType is the type of sections with notes, SHT_NOTE.
const noteType = 7

// Types of program headers.
const (
	loadSegment    = 1
	dynamicSegment = 2
)

// tag is the type of an entry in the dynamic table.
type tag int64

const (
	tagEnd     tag = 0
	tagStrings tag = 5 // the address of the string table
	tagSize    tag = 10
	tagSONAME  tag = 14
)

// libraryType is the type of libraries and of position-independent programs, ET_DYN.
const libraryType = 3

// typeName is the name of a file's type in the System V ABI.
func typeName(t uint16) string {
	switch t {
	case 1:
		return "ET_REL"
	case 2:
		return "ET_EXEC"
	case libraryType:
		return "ET_DYN"
	case 4:
		return "ET_CORE"
	}
	return "the unknown type " + strconv.Itoa(int(t))
}

// Machine is an architecture as numbered in ELF headers.
type Machine uint16

// The machines that NVIDIA has drivers for.
const (
	X8664   Machine = 62
	AArch64 Machine = 183
)

// MachineOf is the machine of a GOARCH: arm64, or amd64 for every other value.
func MachineOf(goarch string) Machine {
	if goarch == "arm64" {
		return AArch64
	}
	return X8664
}

// String is the machine's name in the System V ABI, if Linux distributions have libraries for it.
func (m Machine) String() string {
	switch m {
	case 3:
		return "EM_386"
	case 20:
		return "EM_PPC"
	case 21:
		return "EM_PPC64"
	case 22:
		return "EM_S390"
	case 40:
		return "EM_ARM"
	case X8664:
		return "EM_X86_64"
	case AArch64:
		return "EM_AARCH64"
	case 243:
		return "EM_RISCV"
	case 258:
		return "EM_LOONGARCH"
	}
	return "machine number " + strconv.Itoa(int(m))
}
