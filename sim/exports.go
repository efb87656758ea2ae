package sim

import (
	"bytes"
	"debug/elf"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// exportLists has the functions that real drivers export.
//
//go:embed exports.txt
var exportLists string

// oldestBranch is the first branch of exports.txt. Earlier drivers are taken to have its functions too.
const oldestBranch = 470

// export is the range of branches in which a function of libnvidia-ml is exported; last is 0 if it was not removed.
type export struct{ first, last int }

// has reports whether the driver of a branch exports the function.
func (e export) has(branch int) bool {
	return (branch >= e.first || e.first == oldestBranch) && (branch <= e.last || e.last == 0)
}

// parseExports returns the functions of exportLists by name, and the newest branch in it.
func parseExports() (functions map[string]export, newest int, err error) {
	functions = map[string]export{}
	for line := range strings.Lines(exportLists) {
		branches, name, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || branches == "#" {
			continue
		}
		first, last, removed := strings.Cut(branches, "-")
		var e export
		if e.first, err = strconv.Atoi(first); err != nil {
			return nil, 0, fmt.Errorf("exports.txt: %s: %w", name, err)
		}
		if removed {
			if e.last, err = strconv.Atoi(last); err != nil {
				return nil, 0, fmt.Errorf("exports.txt: %s: %w", name, err)
			}
		}
		functions[name] = e
		newest = max(newest, e.first)
	}
	return functions, newest, nil
}

// RealFunctions returns the functions that the libnvidia-ml of a real driver exports, sorted. Functions that are newer
// than all known drivers are missing.
func RealFunctions(driver string) ([]string, error) {
	functions, _, err := parseExports()
	_, branch := cudaVersion(driver)
	maps.DeleteFunc(functions, func(_ string, e export) bool { return !e.has(branch) })
	return slices.Sorted(maps.Keys(functions)), err
}

// hideNewer makes the functions of NVML unfindable that a driver does not export. Of a driver between two that are
// known, it leaves those of the earlier one, so that the library never has more than a real one; of a driver that is
// newer than all that are known, it leaves all but those that were removed.
func hideNewer(library []byte, driver string) error {
	functions, newest, err := parseExports()
	if err != nil {
		return err
	}
	_, branch := cudaVersion(driver)
	return renameSymbols(library, func(name string) bool {
		e, known := functions[name]
		if !known {
			return strings.HasPrefix(name, "nvml") && branch <= newest
		}
		return !e.has(branch)
	})
}

// renameSymbols gives the exported symbols that hide reports another name, in which a letter is no part of names in C.
// The symbols' hashes stay those of the old names, so the loader finds them by neither. Nothing in the library refers
// to them by name.
func renameSymbols(library []byte, hide func(name string) bool) error {
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return fmt.Errorf("read the compiled library: %w", err)
	}
	symbols, names := f.Section(".dynsym"), f.Section(".dynstr")
	if symbols == nil || names == nil {
		return errors.New("the compiled library exports no symbols")
	}
	table := library[symbols.Offset : symbols.Offset+symbols.Size]
	text := library[names.Offset : names.Offset+names.Size]
	for ; len(table) >= elf.Sym64Size; table = table[elf.Sym64Size:] {
		at := text[binary.LittleEndian.Uint32(table):] // st_name is the first field
		name, _, _ := bytes.Cut(at, []byte{0})
		if hide(string(name)) {
			at[0] = '-'
		}
	}
	return nil
}
