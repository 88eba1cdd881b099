"""Parts of the Vulkan driver."""
