package devcgroup

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// hasFilters reports whether device programs are attached to the cgroup itself.
func (c *cgroup) hasFilters() (bool, error) {
	dir, err := c.dir.Open(".")
	if err != nil {
		return false, err
	}
	defer dir.Close()
	ids, _, err := attachedPrograms(dir, 0)
	return len(ids) > 0, err
}

// allowByFilter replaces the BPF programs that filter devices in cgroup v2 (bpf.go has the calls). A device is denied
// if one of them denies it, so all of them are replaced.
func (c *cgroup) allowByFilter(change *Change, rules []Rule) error {
	dir, err := c.dir.Open(".") // undo needs it later
	if err != nil {
		return err
	}
	ids, flags, err := attachedPrograms(dir, 0)
	if err != nil {
		return err
	}
	admit := prologue(rules)
	for _, id := range ids {
		current, err := openProgram(id)
		if err != nil {
			return err
		}
		code, err := current.instructions()
		if err != nil {
			return err
		}
		if code = unblind(code); len(code) >= len(admit) && slices.Equal(code[:len(admit)], admit) {
			continue
		}
		next, err := loadProgram(slices.Concat(admit, code))
		if err != nil {
			return fmt.Errorf("admit the devices before %s: %w", current.Name(), err)
		}
		if err := replaceProgram(dir, current, next, flags); err != nil {
			return err
		}
		change.undo = append(change.undo, func() error { return replaceProgram(dir, next, current, flags) })
	}
	return nil
}

// prologue returns instructions that admit the devices of the rules, as the programs of runc do. Otherwise they fall
// through to the instructions behind them, with the program's context still in register 1.
//
// The context is struct bpf_cgroup_dev_ctx: a word of which the upper half is the access and the lower half the type of
// the device, a word with the major number, a word with the minor number.
func prologue(rules []Rule) []instruction {
	const (
		result, context, access, kind, major, minor = 0, 1, 2, 3, 4, 5 // registers

		load       = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W
		move       = bpfALU64 | bpfMov | unix.BPF_K
		copyFrom   = bpfALU64 | bpfMov | unix.BPF_X
		and        = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		shiftRight = unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K
		unequal    = unix.BPF_JMP | bpfJNE | unix.BPF_K
		exit       = unix.BPF_JMP | bpfExit
	)
	code := []instruction{
		{code: load, registers: access | context<<4},
		{code: copyFrom, registers: kind | access<<4},
		{code: and, registers: kind, constant: 0xffff},
		{code: shiftRight, registers: access, constant: 16},
		{code: load, registers: major | context<<4, offset: 4},
		{code: load, registers: minor | context<<4, offset: 8},
	}
	for _, r := range rules {
		kindOf := int32(unix.BPF_DEVCG_DEV_CHAR)
		if r.Type == 'b' {
			kindOf = unix.BPF_DEVCG_DEV_BLOCK
		}
		code = append(code, // a mismatch continues behind the rule's eight instructions
			instruction{code: unequal, registers: kind, constant: kindOf, offset: 7},
			instruction{code: unequal, registers: major, constant: int32(r.Major), offset: 6},
			instruction{code: unequal, registers: minor, constant: int32(r.Minor), offset: 5},
			instruction{code: copyFrom, registers: result | access<<4},
			instruction{code: and, registers: result, constant: ^accessBits(r.Access)},
			instruction{code: unequal, registers: result, constant: 0, offset: 2},
			instruction{code: move, registers: result, constant: 1},
			instruction{code: exit},
		)
	}
	return code
}

// Of linux/bpf.h, beside what the package unix has.
const (
	bpfALU64 = 0x07
	bpfMov   = 0xb0
	bpfJNE   = 0x50
	bpfExit  = 0x90
)

func accessBits(access string) int32 {
	bits := map[rune]int32{
		'r': unix.BPF_DEVCG_ACC_READ, 'w': unix.BPF_DEVCG_ACC_WRITE, 'm': unix.BPF_DEVCG_ACC_MKNOD,
	}
	var all int32
	for _, letter := range access {
		all |= bits[letter]
	}
	return all
}

// unblind makes instructions loadable that were read back from a kernel that hardens its compiler
// (sysctl net.core.bpf_jit_harden). Such a kernel splits each constant and joins the parts in register 11. Programs may
// not use register 11, so it is replaced by a register that the program does not use. The kernel also sets registers to
// zero by XOR with themselves, after which the verifier does not know their values: that becomes a move of zero.
func unblind(code []instruction) []instruction {
	const (
		hidden = 11
		xor    = unix.BPF_XOR | unix.BPF_X
		class  = 0x07 // 32 or 64 bits
	)
	used := [16]bool{}
	for _, i := range code {
		used[i.registers&0xf], used[i.registers>>4] = true, true
	}
	spare := uint8(hidden)
	if n := slices.Index(used[6:10], false); n >= 0 {
		spare = uint8(6 + n)
	}
	code = slices.Clone(code)
	for n := range code {
		i := &code[n]
		destination, source := i.registers&0xf, i.registers>>4
		if destination == hidden {
			destination = spare
		}
		if source == hidden {
			source = spare
		}
		i.registers = destination | source<<4
		if (i.code == xor|bpfALU64 || i.code == xor|unix.BPF_ALU) && destination == source {
			*i = instruction{code: i.code&class | bpfMov | unix.BPF_K, registers: destination}
		}
	}
	return code
}

// noteInherited notes that programs above the container's cgroups decide too. The kernel cannot be asked what they
// decide.
func (c *Change) noteInherited(cgroups []*cgroup) error {
	outer := slices.IndexFunc(cgroups, func(cg *cgroup) bool { return cg.unified })
	if outer < 0 {
		return nil
	}
	dir, err := cgroups[outer].dir.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	own, _, err := attachedPrograms(dir, 0)
	if err != nil {
		return err
	}
	all, _, err := attachedPrograms(dir, unix.BPF_F_QUERY_EFFECTIVE)
	if err != nil {
		return err
	}
	if above := len(all) - len(own); above > 0 {
		c.Notes = append(c.Notes, fmt.Sprintf("%d BPF programs above %s filter devices too: where they do not "+
			"admit a device, opening it fails with EPERM", above, cgroups[outer]))
	}
	return nil
}
