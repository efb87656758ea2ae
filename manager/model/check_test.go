package model

import (
	"fmt"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	device := func(host, container, permissions string) RunOptions {
		return RunOptions{Devices: []DeviceNode{{HostPath: host, ContainerPath: container, Permissions: permissions}}}
	}
	mount := func(host, container string) RunOptions {
		return RunOptions{Mounts: []Mount{{HostPath: host, ContainerPath: container}}}
	}
	env := func(name, value string) RunOptions { return RunOptions{Envs: map[string]string{name: value}} }
	annotation := func(key, value string) RunOptions {
		return RunOptions{Annotations: map[string]string{key: value}}
	}
	cdi := func(name string) RunOptions { return RunOptions{CDIDevices: []string{name}} }
	long := strings.Repeat("x", 200_000)
	for name, c := range map[string]struct {
		options RunOptions
		want    string // of the error; empty means none
	}{
		"nothing":                  {RunOptions{}, ""},
		"a value with line breaks": {env("A", "1\n2"), ""},
		"a value of 100,000 bytes": {env("A", long[:100_000]), ""},
		"a file with dots":         {mount("/a/..b", "/c../d"), ""},
		"permissions in any order": {device("/dev/x", "/dev/x", "mrw"), ""},
		"a mount upwards":          {mount("../..", "/x"), `host path of a mount "../..": want an absolute path`},
		"a mount over dots": {
			mount("/x", "/y/../../etc"), `container path of a mount "/y/../../etc": want a path without ..`,
		},
		"a mount without a target": {mount("/x", ""), `container path of a mount "": want an absolute path`},
		"a long path": {mount("/"+long[:4095], "/x"), "it has 4096 bytes, more than the 4095 that a " +
			"path may have"},
		"a NUL in a path": {mount("/x\x00", "/x"), `host path of a mount "/x\x00": it has a '\x00'`},
		"a relative device": {
			device("dev/x", "/dev/x", "r"), `host path of a device node "dev/x": want an absolute path`,
		},
		"no permissions":     {device("/x", "/x", ""), `permissions of a device node "": want some of r, w and m`},
		"other permissions":  {device("/x", "/x", "rx"), `permissions of a device node "rx"`},
		"a permission twice": {device("/x", "/x", "rwr"), `permissions of a device node "rwr"`},
		"a path as a CDI name": {
			cdi("/dev/sda"), `CDI name "/dev/sda": want a qualified name, such as nvidia.com/gpu=0`,
		},
		"a long CDI name":           {cdi("nvidia.com/gpu=" + long), `CDI name "nvidia.com/gpu=xxx`},
		"a variable without a name": {env("", "x"), `name of an environment variable "": want a name without =`},
		"an equals sign in a name":  {env("a=b", "x"), `name of an environment variable "a=b": want a name without =`},
		"a line break in a name": {
			env("a\nb", "x"), `name of an environment variable "a\nb": want a name without control`,
		},
		"a NUL in a name":               {env("a\x00", "x"), "want a name without control characters"},
		"a NUL in a value":              {env("a", "\x00"), `value of the environment variable "a": it has a '\x00'`},
		"a long value":                  {env("a", long), `environment variable "a": it has 200002 bytes with its value`},
		"a line break in a key":         {annotation("a\r", "x"), `name of an annotation "a\r": want a name without control`},
		"a long value of an annotation": {annotation("a", long), `annotation "a": it has 200002 bytes with its value`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := c.options.Check()
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err != nil && len(err.Error()) > 300 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
	var many RunOptions
	for i := range 1000 {
		many.CDIDevices = append(many.CDIDevices, fmt.Sprint(i))
	}
	if err := many.Check(); strings.Count(err.Error(), "\n") != maxProblems-1 {
		t.Errorf("the error has not %d lines: %v", maxProblems, err)
	}
}
