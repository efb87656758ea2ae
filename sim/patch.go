package sim

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
)

// descriptionSection is the library's section that holds the description.
const descriptionSection = ".gpusim"

// patch returns a copy of the compiled library with the description in it.
func patch(library, description []byte) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return nil, fmt.Errorf("read the compiled library: %w", err)
	}
	s := f.Section(descriptionSection)
	if s == nil || s.Type != elf.SHT_PROGBITS || s.Offset+s.Size > uint64(len(library)) {
		return nil, errors.New("the compiled library has no section " + descriptionSection)
	}
	if uint64(len(description)) >= s.Size {
		return nil, fmt.Errorf("the machine's description has %d bytes, the library has room for %d",
			len(description), s.Size-1)
	}
	patched := bytes.Clone(library)
	room := patched[s.Offset : s.Offset+s.Size]
	clear(room[copy(room, description):])
	return patched, nil
}
