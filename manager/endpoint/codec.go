package endpoint

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// maxElements limits the devices, topologies and NUMA nodes of a list, counted together. The smallest of these takes
// two bytes in a message and a hundred in memory.
const maxElements = 500_000

// listCodec decodes lists of devices. A list with too many elements is an error.
type listCodec struct{ encoding.CodecV2 }

func newListCodec() listCodec { return listCodec{encoding.GetCodecV2(proto.Name)} }

// Name returns "", so that the content type is the same as without this codec.
func (listCodec) Name() string { return "" }

// Unmarshal decodes a list. It returns an error if the list has too many elements.
func (c listCodec) Unmarshal(data mem.BufferSlice, v any) error {
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	// The field numbers of the devices in a list, of the topology in a device, and of the NUMA nodes in a topology.
	if countElements(buffer.ReadOnlyData(), 1, 3, 1) > maxElements {
		return fmt.Errorf("the list has more than %d devices, topologies and NUMA nodes", maxElements)
	}
	return c.CodecV2.Unmarshal(mem.BufferSlice{buffer}, v)
}

// countElements returns how many messages would be made if a field and the fields below it were decoded. It stops when
// there are more than maxElements, or where decoding would fail.
func countElements(message []byte, field protowire.Number, below ...protowire.Number) int {
	n := 0
	for len(message) > 0 && n <= maxElements {
		number, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			break
		}
		message = message[size:]
		if size = protowire.ConsumeFieldValue(number, kind, message); size < 0 {
			break
		}
		if number == field && kind == protowire.BytesType {
			n++
			if len(below) > 0 {
				value, _ := protowire.ConsumeBytes(message)
				n += countElements(value, below[0], below[1:]...)
			}
		}
		message = message[size:]
	}
	return n
}
