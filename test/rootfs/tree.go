package rootfs

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Copy copies a tree of directories, files and links to dst, which must not exist.
func Copy(src, dst string) error {
	return filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		to := filepath.Join(dst, rel)
		switch {
		case d.IsDir():
			return os.Mkdir(to, 0o755)
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, to)
		case d.Type().IsRegular():
			return copyFile(path, to)
		}
		return fmt.Errorf("copy %s: a %s", path, d.Type())
	})
}

// copyFile copies a file or what a link points to, with its permissions.
func copyFile(src, dst string) (err error) {
	from, err := os.Open(src)
	if err != nil {
		return err
	}
	defer from.Close()
	info, err := from.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	to, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		return err
	}
	return to.Close()
}

// Digest describes every entry of a tree, by its path: type, permissions, owner, and content, target or device number.
// Two trees with equal digests are the same byte for byte; times of change do not count.
func Digest(dir string) (map[string]string, error) {
	tree := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		tree[rel], err = describe(path)
		return err
	})
	return tree, err
}

func describe(path string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	s := info.Mode().String() + owner(info)
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		return s + " -> " + target, err
	case info.Mode().IsRegular():
		data, err := os.ReadFile(path)
		return fmt.Sprintf("%s %d bytes %x", s, len(data), sha256.Sum256(data)), err
	}
	return s, nil
}

func owner(info fs.FileInfo) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf(" %d:%d device %#x", st.Uid, st.Gid, st.Rdev)
}
