package libtest

import (
	"fmt"
	"strings"
	"testing"
)

const machineLine = "machine name=test driver=580.126.09 kernel=580.126.09 cuda=13000 nvml=13.580.126.09 libdir=" +
	libDir

func gpuLine(index, minor int, bus string, numa int, mig string) string {
	return fmt.Sprintf("gpu index=%d uuid=GPU-%08x-0000-4000-8000-%012x name=NVIDIA%%20H100%%2080GB%%20HBM3 minor=%d "+
		"bus=%s device=0x233010de subsystem=0x16c110de memory=85520809984 cc=9.0 arch=9 brand=nvidia numa=%d mig=%s "+
		"maxmig=7 serial=165000000%d board=692-2G520-0200-000 vbios=96.00.74.00.01 power=700 sms=132",
		index, index, index, minor, bus, numa, mig, index)
}

// testMachine has four GPUs: the second's minor is not its index, the third has no NVLink, the fourth has MIG devices.
var testMachine = strings.Join([]string{
	"gpusim 1",
	machineLine,
	gpuLine(0, 0, "0000:1b:00.0", 0, "disabled"),
	gpuLine(1, 5, "0000:43:00.0", 0, "disabled"),
	gpuLine(2, 2, "0000:52:00.0", 0, "unsupported"),
	gpuLine(3, 3, "0000:df:00.0", 1, "enabled"),
	"migprofile gpu=3 name=1g.10gb id=19 enum=0 slices=1 size=1 starts=0,1,2,3,4,5,6 limit=7 memory=10468982784 " +
		"sms=16 copy=1 decoder=1 jpeg=1",
	"migprofile gpu=3 name=1g.10gb+me id=20 enum=7 slices=1 size=1 starts=0,1,2,3,4,5,6 limit=1 memory=10468982784 " +
		"sms=16 copy=1 decoder=1 jpeg=1 ofa=1",
	"migprofile gpu=3 name=3g.40gb id=9 enum=2 slices=3 size=4 starts=0,4 limit=2 memory=42412802048 " +
		"sms=60 copy=3 decoder=3 jpeg=3",
	"mig gpu=3 index=0 uuid=MIG-00000003-0000-4000-8000-000000000100 gi=7 ci=0 profile=1g.10gb memory=10468982784 " +
		"gislices=1 cislices=1 sms=16 giprofile=19 ciprofile=0 start=0 size=1 gicap=1 cicap=2 copy=1 decoder=1 jpeg=1",
	"mig gpu=3 index=1 uuid=MIG-00000003-0000-4000-8000-000000000101 gi=2 ci=0 profile=2c.3g.40gb memory=42412802048 " +
		"gislices=3 cislices=2 sms=32 giprofile=9 ciprofile=1 start=4 size=4 gicap=3 cicap=4 copy=3 decoder=3 jpeg=3",
	"mig gpu=3 index=2 uuid=MIG-00000003-0000-4000-8000-000000000102 gi=2 ci=1 profile=1c.3g.40gb memory=42412802048 " +
		"gislices=3 cislices=1 sms=16 giprofile=9 ciprofile=0 start=4 size=4 cistart=2 gicap=3 cicap=5 " +
		"copy=3 decoder=3 jpeg=3",
	"mig gpu=3 index=3 uuid=MIG-00000003-0000-4000-8000-000000000103 gi=8 ci=0 profile=1g.10gb+me memory=10468982784 " +
		"gislices=1 cislices=1 sms=16 giprofile=20 ciprofile=0 start=1 size=1 gicap=6 cicap=7 " +
		"copy=1 decoder=1 jpeg=1 ofa=1",
	"link a=0 b=1 pcie=pix", "link a=0 b=2 pcie=node", "link a=1 b=2 pcie=node",
	"nvlink gpu=0 port=0 remote=0000:c1:00.0 type=switch version=4 speed=26562",
	"nvlink gpu=0 port=2 remote=0000:c3:00.0 type=switch version=4 speed=26562",
	"nvlink gpu=1 port=0 remote=0000:c1:00.0 type=switch version=4 speed=26562",
	"nvlink gpu=3 port=0 remote=0000:c1:00.0 type=switch version=4 speed=26562",
	"something from=the future",
}, "\n") + "\n"

const consumerMachine = "gpusim 1\n" + machineLine + "\n" +
	"gpu index=0 uuid=GPU-0 name=NVIDIA%20GeForce%20RTX%204090 minor=0 bus=0000:01:00.0 device=0x268410de " +
	"memory=25757220864 cc=8.9 arch=8 brand=geforce numa=-1 mig=unsupported power=450 sms=128\n"

var testMachineNodes = []string{
	"nvidia0", "nvidia5", "nvidia2", "nvidia3", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2",
	"nvidia-caps/nvidia-cap3", "nvidia-caps/nvidia-cap4", "nvidia-caps/nvidia-cap5", "nvidia-caps/nvidia-cap6",
	"nvidia-caps/nvidia-cap7",
}

// newTestNode is a node with the test machine and all its device nodes.
func newTestNode(t testing.TB) *node {
	t.Helper()
	n := newNode(t, testMachine)
	n.addNodes(t, testMachineNodes...)
	return n
}
