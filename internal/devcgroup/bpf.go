package devcgroup

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of bpf(2) for programs that filter devices. The attributes are members of union bpf_attr in linux/bpf.h.
//
// github.com/cilium/ebpf makes the same calls, but it adds 1.3 MB to the program, does not return the flags with which
// programs are attached, and cannot load programs that it has read back.

// The attributes' pointers are those of a 64-bit machine.
var _ [unsafe.Sizeof(uintptr(0)) - 8]struct{}

// instruction is struct bpf_insn.
type instruction struct {
	code      uint8
	registers uint8 // the destination in the lower four bits, the source in the upper four
	offset    int16
	constant  int32
}

// program is a loaded BPF program. Like every os.File it is closed at the latest when it is garbage.
type program struct{ *os.File }

// maxPrograms is how many programs of a type a cgroup can have, BPF_CGROUP_MAX_PROGS.
const maxPrograms = 64

// attachedPrograms returns the IDs of the device programs that are attached to a cgroup, and the flags that they were
// attached with. With BPF_F_QUERY_EFFECTIVE the IDs include the programs of the cgroups above.
func attachedPrograms(dir *os.File, queryFlags uint32) (ids []uint32, attachFlags uint32, err error) {
	ids = make([]uint32, 16*maxPrograms)
	attr := struct {
		target, attachType, queryFlags, attachFlags uint32
		ids                                         *uint32
		count, _                                    uint32
		_, _, _, revision                           uint64 // Linux 6.17 writes the revision into smaller attributes too
	}{
		target: uint32(dir.Fd()), attachType: unix.BPF_CGROUP_DEVICE, queryFlags: queryFlags,
		ids: &ids[0], count: uint32(len(ids)),
	}
	_, err = bpf(unix.BPF_PROG_QUERY, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(dir)
	if err != nil {
		return nil, 0, fmt.Errorf("list the BPF programs: %w", err)
	}
	return ids[:attr.count], attr.attachFlags, nil
}

func openProgram(id uint32) (program, error) {
	attr := struct{ id, nextID, flags uint32 }{id: id}
	fd, err := bpf(unix.BPF_PROG_GET_FD_BY_ID, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err != nil {
		return program{}, fmt.Errorf("open BPF program %d: %w", id, err)
	}
	return program{os.NewFile(fd, fmt.Sprintf("BPF program %d", id))}, nil
}

// programInfo is the beginning of struct bpf_prog_info.
type programInfo struct {
	_           [5]uint32 // type, ID, tag, size of the machine code
	loadedBytes uint32
	_           uint64 // machine code
	loaded      *instruction
	_           uint64 // time
	_           uint32 // user
	maps        uint32
	_           uint64 // IDs of the maps
}

func (p program) info(info *programInfo) error {
	attr := struct {
		fd, size uint32
		info     *programInfo
	}{fd: uint32(p.Fd()), size: uint32(unsafe.Sizeof(*info)), info: info}
	_, err := bpf(unix.BPF_OBJ_GET_INFO_BY_FD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(p)
	if err != nil {
		return fmt.Errorf("describe %s: %w", p.Name(), err)
	}
	return nil
}

// instructions reads back what the kernel has loaded.
func (p program) instructions() ([]instruction, error) {
	var info programInfo
	if err := p.info(&info); err != nil {
		return nil, err
	}
	if info.loadedBytes == 0 {
		return nil, fmt.Errorf("the kernel does not show the instructions of %s: "+
			"it needs CAP_BPF or CAP_SYS_ADMIN", p.Name())
	}
	if info.maps != 0 {
		return nil, fmt.Errorf("%s uses BPF maps, and cannot be loaded again", p.Name())
	}
	loaded := make([]instruction, info.loadedBytes/uint32(unsafe.Sizeof(instruction{})))
	info = programInfo{loadedBytes: info.loadedBytes, loaded: &loaded[0]}
	if err := p.info(&info); err != nil {
		return nil, err
	}
	if info.loaded == nil {
		return nil, fmt.Errorf("the kernel does not show the instructions of %s: "+
			"it hides them with sysctl net.core.bpf_jit_harden=2 and kernel.kptr_restrict=2", p.Name())
	}
	return loaded, nil
}

// loadProgram loads a device program.
func loadProgram(code []instruction) (program, error) {
	fd, err := tryLoad(code)
	if errors.Is(err, unix.EPERM) {
		// Before Linux 5.11, programs count against the locked memory.
		unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
		if unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited) == nil {
			fd, err = tryLoad(code)
		}
	}
	if err != nil {
		return program{}, fmt.Errorf("load a BPF program of %d instructions: %w", len(code), err)
	}
	return program{os.NewFile(fd, "new BPF program")}, nil
}

func tryLoad(code []instruction) (uintptr, error) {
	license := []byte("Apache-2.0\x00")
	attr := struct {
		programType, count  uint32
		code                *instruction
		license             *byte
		logLevel, logSize   uint32
		log                 *byte
		kernelVersion, flag uint32
		name                [16]byte
	}{
		programType: unix.BPF_PROG_TYPE_CGROUP_DEVICE, count: uint32(len(code)),
		code: &code[0], license: &license[0], name: [16]byte{'g', 'p', 'u', '_', 'c', 'd', 'i'},
	}
	return bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
}

// replaceProgram attaches a program to a cgroup in place of another one. The flags are those of the old one.
func replaceProgram(dir *os.File, current, next program, flags uint32) error {
	attr := struct{ target, program, attachType, flags, replaced uint32 }{
		target: uint32(dir.Fd()), program: uint32(next.Fd()), attachType: unix.BPF_CGROUP_DEVICE, flags: flags,
	}
	if flags&unix.BPF_F_ALLOW_MULTI != 0 { // otherwise there is one program, which is always replaced
		attr.flags |= unix.BPF_F_REPLACE
		attr.replaced = uint32(current.Fd())
	}
	_, err := bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(dir)
	runtime.KeepAlive(current)
	runtime.KeepAlive(next)
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("replace %s: it is no longer attached, or it is attached by a BPF link, "+
			"which cannot be replaced: %w", current.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("replace %s: %w", current.Name(), err)
	}
	return nil
}

// maxInterrupts is how often a load is tried. A signal, such as one of Go's scheduler, interrupts the verifier.
const maxInterrupts = 30

func bpf(command uintptr, attr unsafe.Pointer, size uintptr) (uintptr, error) {
	for try := 1; ; try++ {
		fd, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attr), size)
		if errno == 0 {
			return fd, nil
		}
		if errno != unix.EAGAIN || try == maxInterrupts {
			return 0, errno
		}
	}
}
