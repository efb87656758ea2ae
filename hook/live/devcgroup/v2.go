package devcgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
)

// checkReadable returns an error if the kernel changes BPF programs while loading them, so that they cannot be loaded
// again. A kernel that hardens its JIT compiler splits constants and joins them in a register that programs may not
// use.
func checkReadable(proc string) error {
	value, err := fileio.ReadFile(filepath.Join(proc, "sys/net/core/bpf_jit_harden"), maxRead)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without the JIT compiler has no such file
		return err
	}
	if strings.TrimSpace(string(value)) == "2" {
		return errors.New("with net.core.bpf_jit_harden=2 the kernel hides BPF programs, so they cannot be kept: use " +
			"gpu-cdi-runtime, which gives containers their devices before they are created")
	}
	return nil
}

// filters returns the device programs that are attached to the cgroup itself.
func filters(dir *os.File) ([]link.AttachedProgram, error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		return nil, fmt.Errorf("list the BPF programs: %w", err)
	}
	return result.Programs, nil
}

func (c *cgroup) hasFilters() (bool, error) {
	dir, err := c.dir.Open(".")
	if err != nil {
		return false, err
	}
	defer dir.Close()
	attached, err := filters(dir)
	return len(attached) > 0, err
}

// allowByFilter replaces all BPF programs that filter devices in the cgroup (v2), since each of them can deny a
// device.
func (c *cgroup) allowByFilter(proc string, rules []Rule) error {
	if err := checkReadable(proc); err != nil {
		return err
	}
	dir, err := c.dir.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	attached, err := filters(dir)
	if err != nil {
		return err
	}
	admit := prologue(rules)
	for _, p := range attached {
		if err := replaceFilter(dir, p.ID, admit); err != nil {
			return fmt.Errorf("admit the devices before BPF program %d: %w", p.ID, err)
		}
	}
	return nil
}

// replaceFilter replaces an attached program. The new program runs the instructions in `before` and then those of the
// old program.
func replaceFilter(dir *os.File, id ebpf.ProgramID, before asm.Instructions) error {
	current, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err
	}
	defer current.Close()
	code, err := instructions(current)
	if err != nil {
		return err
	}
	next, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "gpu_cdi", Type: ebpf.CGroupDevice, Instructions: slices.Concat(before, code), License: "Apache-2.0",
	})
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	defer next.Close()
	return link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: int(dir.Fd()), Program: next, Attach: ebpf.AttachCGroupDevice,
		Flags: unix.BPF_F_ALLOW_MULTI, Anchor: link.ReplaceProgram(current), // as runc, crun and systemd do
	})
}

// instructions returns a program's instructions in a form that can be loaded again.
func instructions(p *ebpf.Program) (asm.Instructions, error) {
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	if maps, _ := info.MapIDs(); len(maps) > 0 {
		return nil, errors.New("it uses BPF maps, and cannot be loaded again")
	}
	code, err := info.Instructions()
	if err != nil {
		return nil, fmt.Errorf("read the instructions: %w", err)
	}
	for i := range code {
		code[i].Metadata = asm.Metadata{} // removes symbols and types, which the new program does not have
	}
	return code, nil
}

// prologue returns instructions that admit the devices of the rules, like the programs of runc. For other devices,
// execution continues after them, with the program's context still in register 1.
//
// The context is a struct bpf_cgroup_dev_ctx: a word with the access in its upper half and the type of the device in
// its lower half, a word with the major number, and a word with the minor number.
func prologue(rules []Rule) asm.Instructions {
	const result, context, access, kind, major, minor = asm.R0, asm.R1, asm.R2, asm.R3, asm.R4, asm.R5
	code := asm.Instructions{
		asm.LoadMem(access, context, 0, asm.Word),
		asm.Mov.Reg(kind, access),
		asm.And.Imm32(kind, 0xffff),
		asm.RSh.Imm32(access, 16),
		asm.LoadMem(major, context, 4, asm.Word),
		asm.LoadMem(minor, context, 8, asm.Word),
	}
	next := "rule 0"
	for i, r := range rules {
		kindOf := int32(unix.BPF_DEVCG_DEV_CHAR)
		if r.Type == 'b' {
			kindOf = unix.BPF_DEVCG_DEV_BLOCK
		}
		this := next
		next = fmt.Sprintf("rule %d", i+1)
		code = append(code,
			asm.JNE.Imm32(kind, kindOf, next).WithSymbol(this),
			asm.JNE.Imm32(major, int32(r.Major), next),
			asm.JNE.Imm32(minor, int32(r.Minor), next),
			asm.Mov.Reg(result, access),
			asm.And.Imm32(result, ^accessBits(r.Access)),
			asm.JNE.Imm32(result, 0, next),
			asm.Mov.Imm(result, 1),
			asm.Return(),
		)
	}
	return append(code, asm.Mov.Reg(context, context).WithSymbol(next)) // does nothing, but has the last label
}

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
