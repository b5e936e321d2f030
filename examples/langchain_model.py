"""Use a model in LangChain (`pip install langchain-core`)."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import SimpleChatModel
from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from vkmoe import LLM


class ChatVkmoe(SimpleChatModel):
    """Gives LangChain the replies of a model that is loaded here."""

    llm: LLM
    max_tokens: int = 24

    @property
    def _llm_type(self) -> str:
        return "vkmoe"

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        given = convert_to_openai_messages(messages)
        assert isinstance(given, list)
        return self.llm.chat(given, stop=stop or [], max_tokens=self.max_tokens, seed=1).content


prompt = ChatPromptTemplate([("system", "You write Python."), ("human", "def {name}():")])
with LLM() as llm:
    chain = prompt | ChatVkmoe(llm=llm) | StrOutputParser()
    print(chain.invoke({"name": "main"}))
